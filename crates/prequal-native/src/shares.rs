//! How Envoy's built-in policies share requests: among priorities, between healthy and degraded hosts, among
//! localities. Pure arithmetic.
//!
//! The rules and the values in the tests are those of Envoy's documentation ("Priority levels", "Degraded endpoints",
//! "Panic threshold", "Locality weighted load balancing"). Percentages are whole numbers, rounded as Envoy rounds them.

/// Envoy's overprovisioning factor, per cent. A priority or locality passes on some requests if less than 100/1.4 % of
/// its hosts are usable.
const OVERPROVISIONING: usize = 140;

/// Number of hosts of one priority, or of one locality in it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Counts {
    /// All hosts, whatever their health.
    pub(crate) total: usize,
    pub(crate) healthy: usize,
    pub(crate) degraded: usize,
}

/// Share of all requests that goes to one priority, per cent.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Load {
    /// For the healthy hosts.
    pub(crate) healthy: usize,
    /// For the degraded hosts.
    pub(crate) degraded: usize,
    /// Whether all hosts of the priority get the requests of both shares, whatever their health.
    pub(crate) panic: bool,
}

/// Returns the load of each priority, from the most to the least preferred. The sum is 100 if there is at least one
/// priority. There is one exception: if `panic_threshold` is 1, all hosts' shares may round to 0 although not every
/// priority is in panic. The sum is then 0.
///
/// A priority is in panic if less than `panic_threshold` per cent of its hosts are healthy or degraded, and if all
/// priorities together cannot take all requests.
pub(crate) fn loads(priorities: &[Counts], panic_threshold: u32) -> Vec<Load> {
    let healthy: Vec<usize> =
        priorities.iter().map(|counts| available(counts.healthy, counts.total)).collect();
    let degraded: Vec<usize> =
        priorities.iter().map(|counts| available(counts.degraded, counts.total)).collect();
    let total = healthy.iter().chain(&degraded).sum::<usize>().min(100);
    let mut loads = match total {
        0 => vec![Load::default(); priorities.len()],
        _ => by_availability(&healthy, &degraded, total),
    };
    if total == 0 && panic_threshold == 0 {
        if let Some(first) = loads.first_mut() {
            first.healthy = 100;
        }
        return loads;
    }
    for (load, counts) in loads.iter_mut().zip(priorities) {
        let usable = (counts.healthy + counts.degraded) * 100;
        load.panic = total < 100 && usable < panic_threshold as usize * counts.total.max(1);
    }
    if loads.iter().all(|load| load.panic) {
        return by_size(priorities);
    }
    loads
}

/// Returns the share of the requests that these hosts can take, per cent.
fn available(hosts: usize, total: usize) -> usize {
    (OVERPROVISIONING * hosts).checked_div(total).unwrap_or(0).min(100)
}

/// Shares the requests by what each priority can take: healthy hosts first, then degraded ones. `total` is what all
/// together can take, at most 100 %. If it is less, all shares are scaled up by the same factor.
fn by_availability(healthy: &[usize], degraded: &[usize], total: usize) -> Vec<Load> {
    let mut left = 100;
    let mut take = |available: &usize| {
        let load = (available * 100 / total).min(left);
        left -= load;
        load
    };
    let healthy_loads: Vec<usize> = healthy.iter().map(&mut take).collect();
    let degraded_loads: Vec<usize> = degraded.iter().map(&mut take).collect();
    let loads = healthy_loads.into_iter().zip(degraded_loads);
    let mut loads: Vec<Load> =
        loads.map(|(healthy, degraded)| Load { healthy, degraded, panic: false }).collect();
    // The remainder of the rounding goes to the first priority that can take anything.
    if let Some(first) = healthy.iter().position(|available| *available > 0) {
        loads.iter_mut().skip(first).take(1).for_each(|load| load.healthy += left);
    } else if let Some(first) = degraded.iter().position(|available| *available > 0) {
        loads.iter_mut().skip(first).take(1).for_each(|load| load.degraded += left);
    }
    loads
}

/// Shares the requests by the number of hosts, when all priorities are in panic.
fn by_size(priorities: &[Counts]) -> Vec<Load> {
    let total: usize = priorities.iter().map(|counts| counts.total).sum();
    let load = |counts: &Counts| (100 * counts.total).checked_div(total).unwrap_or(0);
    let mut loads: Vec<Load> =
        priorities.iter().map(|counts| Load { healthy: load(counts), degraded: 0, panic: true }).collect();
    let left = 100 - loads.iter().map(|load| load.healthy).sum::<usize>();
    let first = priorities.iter().position(|counts| counts.total > 0).unwrap_or(0);
    loads.iter_mut().skip(first).take(1).for_each(|load| load.healthy += left);
    loads
}

/// Returns the weight of a locality of which `usable` of `total` hosts may be used.
pub(crate) fn locality_weight(weight: u32, usable: usize, total: usize) -> f64 {
    if total == 0 {
        return 0.0;
    }
    let availability = OVERPROVISIONING as f64 / 100.0 * usable as f64 / total as f64;
    f64::from(weight) * availability.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Priorities of 100 hosts each, with these numbers of healthy and degraded ones.
    fn of_100<const N: usize>(hosts: [(usize, usize); N]) -> [Counts; N] {
        hosts.map(|(healthy, degraded)| Counts { total: 100, healthy, degraded })
    }

    fn shares(loads: &[Load]) -> Vec<(usize, usize)> {
        loads.iter().map(|load| (load.healthy, load.degraded)).collect()
    }

    fn panics(loads: &[Load]) -> Vec<bool> {
        loads.iter().map(|load| load.panic).collect()
    }

    /// The tables in Envoy's documentation do not round as Envoy does, so a share may be one per cent off.
    fn assert_near(loads: &[Load], table: &[usize]) {
        let near = |(load, expected): (&Load, &usize)| load.healthy.abs_diff(*expected) <= 1;
        assert!(loads.iter().zip(table).all(near), "{loads:?}, not {table:?}");
        assert_eq!(loads.iter().map(|load| load.healthy + load.degraded).sum::<usize>(), 100);
    }

    #[test]
    fn priorities_share_by_their_healthy_hosts() {
        for (one, other, expected) in [
            (100, 100, [100, 0]),
            (72, 100, [100, 0]),
            (71, 100, [99, 1]),
            (50, 100, [70, 30]),
            (25, 100, [35, 65]),
            (0, 100, [0, 100]),
            (72, 72, [100, 0]),
            (71, 71, [99, 1]),
            (50, 50, [70, 30]),
            (25, 25, [50, 50]),
        ] {
            let loads = loads(&of_100([(one, 0), (other, 0)]), 0);
            assert_eq!(shares(&loads), expected.map(|share| (share, 0)), "{one} and {other} % healthy");
        }
        for (healthy, expected) in [
            ([100, 100, 100], [100, 0, 0]),
            ([72, 72, 100], [100, 0, 0]),
            ([71, 71, 100], [99, 1, 0]),
            ([50, 50, 100], [70, 30, 0]),
            ([25, 100, 100], [35, 65, 0]),
            ([25, 25, 100], [35, 35, 30]),
            ([25, 25, 20], [36, 35, 29]),
        ] {
            assert_near(&loads(&of_100(healthy.map(|healthy| (healthy, 0))), 0), &expected);
        }
    }

    #[test]
    fn degraded_hosts_take_what_healthy_ones_leave() {
        for (healthy, degraded, expected) in
            [(100, 0, (100, 0)), (71, 0, (100, 0)), (71, 29, (99, 1)), (25, 65, (35, 65)), (5, 0, (100, 0))]
        {
            let loads = loads(&of_100([(healthy, degraded)]), 0);
            assert_eq!(shares(&loads), [expected], "{healthy} % healthy, {degraded} % degraded");
        }
        // The healthy hosts of all priorities come before any degraded one.
        assert_eq!(shares(&loads(&of_100([(0, 100), (100, 0)]), 50)), [(0, 0), (100, 0)]);
        assert_eq!(shares(&loads(&of_100([(50, 50), (10, 90)]), 50)), [(70, 16), (14, 0)]);
        assert_eq!(shares(&loads(&of_100([(0, 50), (0, 50)]), 50)), [(0, 70), (0, 30)]);
        // The example in Envoy's code. With the factor of 1.4, the healthy hosts can take 14, 28 and 14 %, and the
        // degraded ones 28, 14 and 0 %.
        let three = loads(&of_100([(10, 20), (20, 10), (10, 0)]), 0);
        assert_eq!(shares(&three), [(16, 28), (28, 14), (14, 0)]);
    }

    #[test]
    fn priorities_panic_when_all_together_cannot_take_the_requests() {
        for (one, other, expected, panic) in [
            (72, 100, [100, 0], [false, false]),
            (50, 100, [70, 30], [false, false]),
            (25, 100, [35, 65], [false, false]),
            (0, 100, [0, 100], [false, false]),
            (72, 72, [100, 0], [false, false]),
            (71, 71, [99, 1], [false, false]),
            (50, 60, [70, 30], [false, false]),
            (25, 25, [50, 50], [true, true]),
            (5, 65, [7, 93], [true, false]),
        ] {
            let loads = loads(&of_100([(one, 0), (other, 0)]), 50);
            assert_near(&loads, &expected);
            assert_eq!(panics(&loads), panic, "{one} and {other} % healthy");
        }
    }

    #[test]
    fn in_total_panic_the_number_of_hosts_decides() {
        let counts = |total, healthy| Counts { total, healthy, degraded: 0 };
        let all = loads(&[counts(60, 6), counts(30, 9), counts(0, 0)], 50);
        assert_eq!(shares(&all), [(67, 0), (33, 0), (0, 0)]);
        assert_eq!(panics(&all), [true; 3]);
        assert_eq!(shares(&loads(&[counts(0, 0), counts(3, 0)], 50)), [(0, 0), (100, 0)]);
    }

    #[test]
    fn the_threshold_decides_on_panic() {
        // 40 % healthy and 9 % degraded can take 56 + 12 %.
        let counts = of_100([(40, 9)]);
        assert_eq!(panics(&loads(&counts, 50)), [true]);
        assert_eq!(panics(&loads(&counts, 49)), [false]);
        assert_eq!(panics(&loads(&of_100([(0, 0)]), 1)), [true]);
        assert_eq!(loads(&of_100([(0, 0)]), 0), [Load { healthy: 100, degraded: 0, panic: false }]);
        // One healthy host of many rounds to nothing, so all hosts are used.
        assert_eq!(panics(&loads(&[Counts { total: 1000, healthy: 1, degraded: 0 }], 50)), [true]);
        assert_eq!(loads(&[], 50), []);
        assert_eq!(shares(&loads(&[Counts::default()], 50)), [(100, 0)]);
    }

    /// Tests the share of the first of two localities. Their weights are 1 and 2, and the second one is healthy.
    #[test]
    fn localities_count_by_weight_and_availability() {
        for (healthy, expected) in [(100, 33), (72, 33), (69, 32), (50, 26), (25, 15), (0, 0)] {
            let (one, other) = (locality_weight(1, healthy, 100), locality_weight(2, 100, 100));
            let share = 100.0 * one / (one + other);
            assert!(
                (share - f64::from(expected)).abs() <= 0.6,
                "{healthy} % healthy: {share}, not {expected}"
            );
        }
        assert_eq!(locality_weight(7, 0, 0), 0.0);
    }
}
