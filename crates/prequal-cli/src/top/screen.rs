//! The terminal: all clusters at the top, the selected one in detail below. One thread per admin port reads; this
//! thread draws.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::Result;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Table};

use super::agents::{self, Replicas};
use super::scrape::{Admin, Scrape};
use super::view::{Replica, View};

/// Maximum time until a new reading is drawn. A key takes effect at once.
const PATIENCE: Duration = Duration::from_millis(100);

/// A reading: the index of the admin port, and its content.
enum Reading {
    Envoy(usize, Result<Scrape, String>),
    Agent(usize, Result<Replicas, String>),
}

/// Draws until the user quits.
pub(super) fn run(envoys: Vec<Admin>, agents: Vec<Admin>, interval: Duration) -> Result<()> {
    let urls = |admins: &[Admin]| admins.iter().map(|admin| admin.url.clone()).collect();
    let mut state = State::new(urls(&envoys), urls(&agents));
    let (send, receive) = channel();
    for (index, admin) in envoys.into_iter().enumerate() {
        let read = move || Reading::Envoy(index, admin.scrape().map_err(|error| format!("{error:#}")));
        read_until_closed(read, interval, send.clone());
    }
    for (index, admin) in agents.into_iter().enumerate() {
        let read =
            move || Reading::Agent(index, agents::scrape(&admin).map_err(|error| format!("{error:#}")));
        read_until_closed(read, interval, send.clone());
    }
    // This also arranges for the terminal to be restored on a panic.
    let mut terminal = ratatui::try_init()?;
    let done = draw_until_quit(&mut state, &receive, &mut terminal);
    ratatui::restore();
    done
}

fn read_until_closed(read: impl Fn() -> Reading + Send + 'static, interval: Duration, send: Sender<Reading>) {
    std::thread::spawn(move || {
        // A failed send means that the screen is closed.
        while send.send(read()).is_ok() {
            std::thread::sleep(interval);
        }
    });
}

fn draw_until_quit(
    state: &mut State,
    receive: &Receiver<Reading>,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<()> {
    loop {
        for reading in receive.try_iter() {
            match reading {
                Reading::Envoy(index, reading) => state.take(index, reading),
                Reading::Agent(index, reading) => state.take_agent(index, reading),
            }
        }
        terminal.draw(|frame| state.draw(frame))?;
        if event::poll(PATIENCE)?
            && let Event::Key(key) = event::read()?
            && state.press(key)
        {
            return Ok(());
        }
    }
}

/// Criterion by which replicas are sorted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Sort {
    Address,
    Share,
    Active,
    Errors,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Address => Self::Share,
            Self::Share => Self::Active,
            Self::Active => Self::Errors,
            Self::Errors => Self::Address,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Share => "share",
            Self::Active => "active",
            Self::Errors => "errors",
        }
    }

    fn apply(self, replicas: &mut [Replica]) {
        match self {
            Self::Address => replicas.sort_by(|a, b| a.address.cmp(&b.address)),
            Self::Share => replicas.sort_by(|a, b| b.share.total_cmp(&a.share)),
            Self::Active => replicas.sort_by_key(|replica| std::cmp::Reverse(replica.active)),
            Self::Errors => replicas.sort_by(|a, b| b.errors.total_cmp(&a.errors)),
        }
    }
}

#[derive(Debug)]
struct State {
    envoys: Vec<Reader>,
    /// Address of each agent, and its last reading: the agent's replicas, by name.
    agents: Vec<(String, Option<Result<Replicas, String>>)>,
    /// Index of the cluster that is shown in detail; if there are fewer clusters, the last one is shown.
    chosen: usize,
    sort: Sort,
}

/// State of one Envoy.
#[derive(Debug)]
struct Reader {
    url: String,
    last: Option<Scrape>,
    views: Vec<View>,
    /// Reason why there is no newer reading.
    trouble: Option<String>,
}

impl State {
    fn new(envoys: Vec<String>, agents: Vec<String>) -> Self {
        let reader = |url| Reader { url, last: None, views: Vec::new(), trouble: None };
        Self {
            envoys: envoys.into_iter().map(reader).collect(),
            agents: agents.into_iter().map(|url| (url, None)).collect(),
            chosen: 0,
            sort: Sort::Address,
        }
    }

    fn take_agent(&mut self, index: usize, reading: Result<Replicas, String>) {
        if let Some((_, last)) = self.agents.get_mut(index) {
            *last = Some(reading);
        }
    }

    fn take(&mut self, index: usize, reading: Result<Scrape, String>) {
        let Some(envoy) = self.envoys.get_mut(index) else { return };
        match reading {
            Ok(scrape) => {
                // The first reading has nothing to compare with, so its rates are zero.
                let before = envoy.last.as_ref().unwrap_or(&scrape);
                envoy.views = View::between(&envoy.url, before, &scrape);
                envoy.last = Some(scrape);
                envoy.trouble = None;
            }
            Err(error) => {
                envoy.views.clear();
                envoy.last = None;
                envoy.trouble = Some(error);
            }
        }
    }

    fn views(&self) -> impl Iterator<Item = &View> {
        self.envoys.iter().flat_map(|envoy| &envoy.views)
    }

    /// Handles a key. Returns true if the key quits.
    fn press(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        let count = self.views().count().max(1);
        self.chosen = self.chosen.min(count - 1);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Down | KeyCode::Tab | KeyCode::Char('j') => self.chosen = (self.chosen + 1) % count,
            KeyCode::Up | KeyCode::BackTab | KeyCode::Char('k') => {
                self.chosen = (self.chosen + count - 1) % count
            }
            _ => {}
        }
        false
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let views: Vec<&View> = self.views().collect();
        let chosen = self.chosen.min(views.len().saturating_sub(1));
        let waiting = self.envoys.iter().filter(|envoy| envoy.last.is_none() && envoy.trouble.is_none());
        let messages: Vec<Line<'_>> = self
            .envoys
            .iter()
            .filter_map(|envoy| envoy.trouble.as_deref())
            .map(|trouble| Line::styled(trouble, Modifier::BOLD))
            .chain(waiting.map(|envoy| Line::from(format!("{}: reading", envoy.url))))
            .collect();
        // The list is limited so that many clusters leave room for the detail.
        let listed = u16::try_from(views.len()).unwrap_or(u16::MAX).min(frame.area().height / 3);
        let own = self.agent_rows();
        let agents = u16::try_from(own.len()).unwrap_or(u16::MAX).min(frame.area().height / 3);
        let told = u16::try_from(messages.len()).unwrap_or(u16::MAX);
        let rows = [
            Constraint::Length(told),
            Constraint::Length(listed + 1),
            Constraint::Length(7),
            Constraint::Fill(1),
            Constraint::Length(if agents > 0 { agents + 2 } else { 0 }),
            Constraint::Length(1),
        ];
        let [top, list, detail, replicas, below, keys] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(Paragraph::new(messages), top);
        // The selected cluster stays visible.
        let first = (chosen + 1).saturating_sub(usize::from(listed));
        frame.render_widget(clusters(&views[first.min(views.len())..], chosen - first.min(chosen)), list);
        if let Some(view) = views.get(chosen) {
            let mut lines = vec![
                Line::from(""),
                Line::styled(format!("{} {}", view.envoy, view.cluster), Modifier::BOLD),
            ];
            lines.extend(view.lines().into_iter().map(Line::from));
            frame.render_widget(Paragraph::new(lines), detail);
            frame.render_widget(self.replicas(view), replicas);
        }
        if agents > 0 {
            let [_, below] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(below);
            frame.render_widget(agents_table(own), below);
        }
        let help = format!("q quit   up/down cluster   s sort replicas (by {})", self.sort.name());
        frame.render_widget(Paragraph::new(help).style(Modifier::DIM), keys);
    }

    fn replicas(&self, view: &View) -> Table<'static> {
        let mut list = view.replicas.clone();
        self.sort.apply(&mut list);
        let rows = list.into_iter().map(|Replica { address, active, success, errors, share, trouble }| {
            let percent = share * 100.0;
            Row::new([
                address,
                format!("{active:6}"),
                format!("{success:9.1}"),
                format!("{errors:8.1}"),
                format!("{percent:5.1}%"),
                trouble,
            ])
        });
        let widths = [
            Constraint::Min(21),
            Constraint::Length(6),
            Constraint::Length(9),
            Constraint::Length(8),
            Constraint::Length(6),
            Constraint::Fill(1),
        ];
        let head = ["replica", "active", "success/s", "errors/s", " share", "trouble"];
        Table::new(rows, widths).header(Row::new(head).style(Modifier::UNDERLINED))
    }
}

impl State {
    /// Returns one row per replica of each agent, and one per agent that has not been read.
    fn agent_rows(&self) -> Vec<Row<'static>> {
        let row = |name: &str, cells: [String; 4], trouble: &str| {
            Row::new([name.to_owned()].into_iter().chain(cells).chain([trouble.to_owned()]))
        };
        let rows = self.agents.iter().flat_map(|(url, last)| match last {
            Some(Ok(replicas)) => replicas.iter().map(|(name, agent)| row(name, agent.cells(), "")).collect(),
            Some(Err(error)) => vec![row(url, Default::default(), error)],
            None => vec![row(url, Default::default(), "reading")],
        });
        rows.collect()
    }
}

fn agents_table(rows: Vec<Row<'static>>) -> Table<'static> {
    let widths = [
        Constraint::Min(21),
        Constraint::Length(6),
        Constraint::Length(9),
        Constraint::Length(12),
        Constraint::Length(7),
        Constraint::Fill(2),
    ];
    let head = ["agent"].into_iter().chain(agents::HEADINGS).chain(["trouble"]);
    Table::new(rows, widths).header(Row::new(head).style(Modifier::UNDERLINED))
}

fn clusters(views: &[&View], chosen: usize) -> Table<'static> {
    let rows = views.iter().enumerate().map(|(index, view)| {
        let style = if index == chosen { Style::from(Modifier::REVERSED) } else { Style::new() };
        Row::new([
            view.envoy.clone(),
            view.cluster.clone(),
            format!("{:9.1}", view.queries()),
            format!("{:7.1}%", view.fallback() * 100.0),
            format!("{:12.2}", view.probes_per_query()),
            format!("{:4}", view.pool),
            format!("{:7}", view.members),
            if view.panic { "      panic".to_owned() } else { format!("{:11}", view.ejected) },
        ])
        .style(style)
    });
    let widths = [
        Constraint::Fill(2),
        Constraint::Fill(2),
        Constraint::Length(9),
        Constraint::Length(8),
        Constraint::Length(12),
        Constraint::Length(4),
        Constraint::Length(7),
        Constraint::Length(11),
    ];
    let head = ["envoy", "cluster", "  picks/s", "fallback", "probes/query", "pool", "members", "ejected"];
    Table::new(rows, widths).header(Row::new(head).style(Modifier::UNDERLINED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::view::tests::scrape;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::time::Instant;

    fn shown(state: &State, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| state.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn press(state: &mut State, code: KeyCode) -> bool {
        state.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn the_screen_shows_clusters_replicas_and_trouble() {
        let start = Instant::now();
        let mut state = State::new(vec!["http://a:1".into(), "http://b:1".into()], Vec::new());
        assert!(shown(&state, 100, 20).contains("http://b:1: reading"));
        state.take(0, Ok(scrape(start, 0, 400)));
        state.take(0, Ok(scrape(start, 2, 800)));
        state.take(1, Err("http://b:1 cannot be reached".into()));
        let text = shown(&state, 100, 20);
        for part in
            ["my_cluster", "250.0", "20.0%", "http://b:1 cannot be reached", "10.0.0.2:80", "80.0%", "q quit"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        // The screen may have any size.
        for (width, height) in [(1, 1), (20, 3), (300, 100)] {
            shown(&state, width, height);
        }
        state.take(0, Err("gone".into()));
        assert!(!shown(&state, 100, 20).contains("my_cluster"), "an old reading is not shown as current");
    }

    #[test]
    fn agents_are_listed_below_the_clusters() {
        let urls = ["http://c:1", "http://d:1", "http://e:1"].map(str::to_owned);
        let mut state = State::new(Vec::new(), urls.to_vec());
        let replicas = ["http://c:1 127.0.0.1:81", "http://c:1 127.0.0.1:82"].map(str::to_owned);
        state.take_agent(0, Ok(replicas.map(|name| (name, agents::tests::agent())).to_vec()));
        state.take_agent(1, Err("http://d:1 cannot be reached".into()));
        let text = shown(&state, 120, 20);
        for part in
            ["saturates at", "40.1", "25.0%", "127.0.0.1:82", "http://d:1 cannot be reached", "reading"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        for (width, height) in [(1, 1), (20, 3), (300, 100)] {
            shown(&state, width, height);
        }
    }

    #[test]
    fn keys_sort_switch_and_quit() {
        let start = Instant::now();
        let mut state = State::new(vec!["http://a:1".into(), "http://b:1".into()], Vec::new());
        for index in 0..2 {
            state.take(index, Ok(scrape(start, 0, 400)));
            state.take(index, Ok(scrape(start, 2, 800)));
        }
        let first = |state: &State| {
            let text = shown(state, 100, 30);
            text.find("10.0.0.1:80").unwrap() < text.find("10.0.0.2:80").unwrap()
        };
        assert!(first(&state));
        assert!(!press(&mut state, KeyCode::Char('s')));
        assert!(!first(&state), "the largest share comes first");
        let detail = |state: &State| shown(state, 100, 30).contains("http://b:1 my_cluster");
        assert!(!detail(&state));
        for (key, second) in [(KeyCode::Down, true), (KeyCode::Tab, false), (KeyCode::Up, true)] {
            press(&mut state, key);
            assert_eq!(detail(&state), second, "{key:?}");
        }
        assert!(press(&mut state, KeyCode::Char('q')));
    }
}
