//! A model of an inference engine with continuous batching, in iterations of variable length.
//!
//! In each iteration every running sequence generates one token. A sequence that joins the batch is prefilled in its
//! first iteration, which then takes longer for all sequences. A sequence joins when the KV cache has room for its
//! context and all its tokens; until then it waits, and so do those behind it. Contexts of earlier sequences stay
//! cached while there is room.
//!
//! vLLM without chunked prefill schedules in the same way, except that it reserves no room for future tokens and
//! preempts sequences instead. Its prefix cache (automatic prefix caching) also evicts the least recently used prefix
//! that no sequence needs. vLLM also shares the prefix of a sequence that is still running; this model shares only
//! prefixes of finished sequences.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::Tokens;

/// Tokens per chunk of an answer. The first and the last token always end a chunk.
const CHUNK: u32 = 8;
/// Mean length of the trace's contexts, tokens.
const USUAL_CONTEXT: u32 = 2048;

/// The speed and the memory of an engine.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct EngineSpec {
    /// Time in which an iteration reads the model's weights, µs.
    pub(crate) step_us: f64,
    /// Time that each sequence of the batch adds to an iteration, µs.
    pub(crate) sequence_us: f64,
    /// Prefill time per token, µs. Prefill is limited by arithmetic, and the times above are limited by memory. The
    /// two overlap, so an iteration takes the longer of the two.
    pub(crate) prefill_us: f64,
    /// Maximum number of running sequences.
    pub(crate) max_batch: usize,
    /// Maximum number of tokens that an iteration prefills. A single longer context is prefilled alone.
    pub(crate) max_prefill: u32,
    /// Capacity of the KV cache, tokens.
    pub(crate) kv_tokens: u32,
    /// Share of a cached context that the next request of its session has in common with it.
    pub(crate) shared: f64,
}

impl EngineSpec {
    /// Llama 2 70B on two H100 with 80 GB each.
    ///
    /// The times are fitted by eye to `data/perf_model.csv` of Mutinifni/splitwise-sim, measured for the paper that
    /// published the trace. With up to 32 sequences they are within 25 % of it. In the file, a prefill of 512, 2048 and
    /// 8192 tokens takes 84, 308 and 1340 ms. A step takes 37 ms with one sequence, and 40, 42 and 52 ms with 8, 16 and
    /// 32.
    ///
    /// The KV cache takes 320 KB per token (80 layers, 8 heads of 128 values, two bytes each, keys and values). At a
    /// memory utilisation of 0.90 to 0.95, the weights leave 6 to 14 GB for it. `max_prefill` is the longest context of
    /// the trace, rounded up. `shared` is an assumption: the trace is of code completion, where an editor sends the
    /// same file again, changed near the cursor.
    pub(crate) const LLAMA2_70B: Self = Self {
        step_us: 37_000.0,
        sequence_us: 350.0,
        prefill_us: 160.0,
        max_batch: 64,
        max_prefill: 8192,
        kv_tokens: 32_768,
        shared: 0.75,
    };

    /// The same engine, `times` as fast.
    pub(crate) fn faster(self, times: f64) -> Self {
        Self {
            step_us: self.step_us / times,
            sequence_us: self.sequence_us / times,
            prefill_us: self.prefill_us / times,
            ..self
        }
    }

    /// Number of contexts of usual size that the KV cache holds.
    pub(crate) fn contexts(self) -> usize {
        (self.kv_tokens / USUAL_CONTEXT) as usize
    }

    /// Engine time of a request without a cached prefix, in the largest batch that the KV cache allows.
    pub(crate) fn share(self, tokens: Tokens) -> Duration {
        let batch = (self.kv_tokens / tokens.total().max(1)).clamp(1, self.max_batch as u32);
        let token_us = self.step_us / f64::from(batch) + self.sequence_us;
        let us = f64::from(tokens.context) * self.prefill_us + f64::from(tokens.generated) * token_us;
        Duration::from_secs_f64(us / 1e6)
    }
}

/// A request at an engine.
pub(super) struct Sequence {
    /// Its session: requests with the same key share a prefix.
    pub(super) key: Option<String>,
    pub(super) tokens: Tokens,
    /// Receives the chunks; dropped after the last one.
    pub(super) client: mpsc::UnboundedSender<Chunk>,
}

/// Tokens that have been generated.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Chunk {
    /// Number of tokens so far.
    pub(super) generated: u32,
    /// Whether a part of the context was cached.
    pub(super) hit: bool,
}

struct RunningSequence {
    sequence: Sequence,
    generated: u32,
    hit: bool,
}

/// The state of an engine between two iterations.
pub(super) struct Engine {
    spec: EngineSpec,
    /// In order of arrival.
    waiting: VecDeque<Sequence>,
    running: Vec<RunningSequence>,
    /// Tokens of the KV cache that the running sequences have or will need.
    reserved: u32,
    prefixes: Prefixes,
}

impl Engine {
    pub(super) fn new(spec: EngineSpec) -> Self {
        let prefixes = Prefixes::default();
        Self { spec, waiting: VecDeque::new(), running: Vec::new(), reserved: 0, prefixes }
    }

    /// Queues a sequence; returns false if it could never fit.
    pub(super) fn submit(&mut self, sequence: Sequence) -> bool {
        let fits = sequence.tokens.total() <= self.spec.kv_tokens;
        if fits {
            self.waiting.push_back(sequence);
        }
        fits
    }

    /// Begins an iteration: admits what fits, and returns how long the iteration takes. `None` if there is nothing to
    /// do.
    pub(super) fn begin(&mut self) -> Option<Duration> {
        let prefill = self.admit();
        if self.running.is_empty() {
            return None;
        }
        let decode_us = self.spec.step_us + self.spec.sequence_us * self.running.len() as f64;
        let prefill_us = self.spec.prefill_us * f64::from(prefill);
        Some(Duration::from_secs_f64(decode_us.max(prefill_us) / 1e6))
    }

    /// Ends the current iteration: every running sequence has one more token.
    pub(super) fn finish(&mut self) {
        let (reserved, prefixes) = (&mut self.reserved, &mut self.prefixes);
        self.running.retain_mut(|running| {
            running.generated += 1;
            let (RunningSequence { sequence, generated, hit }, last) =
                (&*running, running.generated >= running.sequence.tokens.generated);
            let mut listening = true;
            if *generated == 1 || generated.is_multiple_of(CHUNK) || last {
                let chunk = Chunk { generated: *generated, hit: *hit };
                listening = sequence.client.send(chunk).is_ok();
            }
            if listening && !last {
                return true;
            }
            *reserved -= sequence.tokens.total();
            if let Some(key) = &sequence.key {
                prefixes.keep(key, sequence.tokens.context);
            }
            false
        });
        self.prefixes.shrink(self.spec.kv_tokens - self.reserved);
    }

    /// Moves sequences into the batch in order of arrival; returns the number of tokens to prefill.
    fn admit(&mut self) -> u32 {
        // Drop sequences whose client has gone.
        self.waiting.retain(|sequence| !sequence.client.is_closed());
        let mut prefill = 0;
        while let Some(next) = self.waiting.front()
            && self.running.len() < self.spec.max_batch
            && self.reserved + next.tokens.total() <= self.spec.kv_tokens
        {
            let cached = next.key.as_ref().and_then(|key| self.prefixes.find(key));
            let reused = f64::from(cached.unwrap_or(0).min(next.tokens.context)) * self.spec.shared;
            let left = next.tokens.context - reused as u32;
            if prefill > 0 && prefill + left > self.spec.max_prefill {
                break;
            }
            let Some(sequence) = self.waiting.pop_front() else { break };
            prefill += left;
            self.reserved += sequence.tokens.total();
            self.prefixes.shrink(self.spec.kv_tokens - self.reserved);
            self.running.push(RunningSequence { sequence, generated: 0, hit: cached.is_some() });
        }
        prefill
    }
}

/// Contexts of finished sequences by session, the most recently used at the back.
#[derive(Default)]
struct Prefixes {
    contexts: VecDeque<(String, u32)>,
    tokens: u32,
}

impl Prefixes {
    /// Returns the number of cached tokens of a session, and makes it the most recently used.
    fn find(&mut self, key: &str) -> Option<u32> {
        let (key, context) = self.remove(key)?;
        self.push(key, context);
        Some(context)
    }

    /// Keeps the context of a session instead of its earlier one.
    fn keep(&mut self, key: &str, context: u32) {
        self.remove(key);
        self.push(key.to_owned(), context);
    }

    /// Evicts contexts until the remaining ones take up at most `room` tokens.
    fn shrink(&mut self, room: u32) {
        while self.tokens > room {
            let Some((_, context)) = self.contexts.pop_front() else { return };
            self.tokens -= context;
        }
    }

    fn remove(&mut self, key: &str) -> Option<(String, u32)> {
        let place = self.contexts.iter().position(|(known, _)| known == key)?;
        let found = self.contexts.remove(place)?;
        self.tokens -= found.1;
        Some(found)
    }

    fn push(&mut self, key: String, context: u32) {
        self.contexts.push_back((key, context));
        self.tokens += context;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: EngineSpec = EngineSpec {
        step_us: 1000.0,
        sequence_us: 100.0,
        prefill_us: 10.0,
        max_batch: 3,
        max_prefill: 1000,
        kv_tokens: 2000,
        shared: 0.5,
    };

    fn submit(
        engine: &mut Engine,
        key: &str,
        context: u32,
        generated: u32,
    ) -> mpsc::UnboundedReceiver<Chunk> {
        let (client, chunks) = mpsc::unbounded_channel();
        let tokens = Tokens { context, generated };
        assert!(engine.submit(Sequence { key: Some(key.to_owned()), tokens, client }));
        chunks
    }

    /// Runs one iteration; returns its length in µs, 0 if there was nothing to do.
    fn iterate(engine: &mut Engine) -> u128 {
        let took = engine.begin().map_or(0, |time| time.as_micros());
        engine.finish();
        took
    }

    #[test]
    fn an_iteration_grows_with_the_batch_and_a_prefill_blocks_it() {
        let mut engine = Engine::new(SPEC);
        let mut first = submit(&mut engine, "a", 10, 9);
        assert_eq!(iterate(&mut engine), 1100, "a short prefill hides behind the step");
        let _second = submit(&mut engine, "b", 500, 9);
        assert_eq!(iterate(&mut engine), 5000, "a long prefill takes longer than the step");
        assert_eq!(iterate(&mut engine), 1200);
        for _ in 3..9 {
            iterate(&mut engine);
        }
        let mut chunks = Vec::new();
        while let Ok(chunk) = first.try_recv() {
            chunks.push(chunk.generated);
        }
        assert_eq!(chunks, [1, 8, 9]);
        assert!(first.is_closed(), "the answer has ended");
    }

    #[test]
    fn a_sequence_and_those_behind_it_wait_until_its_tokens_fit() {
        let mut engine = Engine::new(SPEC);
        let _large = submit(&mut engine, "a", 1500, 2);
        let mut next = submit(&mut engine, "b", 700, 1);
        let mut small = submit(&mut engine, "c", 10, 1);
        iterate(&mut engine);
        iterate(&mut engine);
        assert!(next.try_recv().is_err() && small.try_recv().is_err(), "the order is kept");
        iterate(&mut engine);
        assert!(next.try_recv().is_ok() && small.try_recv().is_ok());
        assert_eq!(iterate(&mut engine), 0, "nothing is left, and nothing stays reserved");
        assert_eq!(engine.reserved, 0);
        let (client, _chunks) = mpsc::unbounded_channel();
        let tokens = Tokens { context: 2000, generated: 1 };
        assert!(!engine.submit(Sequence { key: None, tokens, client }), "could never fit");
    }

    #[test]
    fn batch_and_prefill_of_an_iteration_are_limited() {
        let mut engine = Engine::new(SPEC);
        let _all: Vec<_> = (0..4).map(|number| submit(&mut engine, &number.to_string(), 400, 5)).collect();
        assert_eq!(iterate(&mut engine), 8000, "two prefills of 400 tokens, at 10 µs a token");
        assert_eq!(iterate(&mut engine), 4000, "one more");
        assert_eq!(iterate(&mut engine), 1300, "the batch is full");
    }

    #[test]
    fn a_cached_prefix_saves_its_part_of_the_prefill_until_it_is_evicted() {
        let mut engine = Engine::new(SPEC);
        let mut hits = Vec::new();
        // `b` and `c` together leave no room for the context of `a`.
        for (key, context) in [("a", 800), ("a", 600), ("b", 900), ("c", 900), ("a", 600)] {
            let mut chunks = submit(&mut engine, key, context, 1);
            let took = iterate(&mut engine);
            hits.push((took, chunks.try_recv().unwrap().hit));
        }
        assert_eq!(hits, [(8000, false), (3000, true), (9000, false), (9000, false), (6000, false)]);
    }

    #[test]
    fn a_request_whose_client_has_gone_makes_room() {
        let mut engine = Engine::new(SPEC);
        drop(submit(&mut engine, "a", 1500, 100));
        let mut next = submit(&mut engine, "b", 1500, 1);
        drop(submit(&mut engine, "c", 10, 1));
        iterate(&mut engine);
        assert!(next.try_recv().is_ok(), "a waiting request without a client is never started");
        assert_eq!(iterate(&mut engine), 0);
    }

    #[test]
    fn a_request_takes_up_its_prefill_and_its_part_of_every_step() {
        // Four sequences of 500 tokens fit into 2000 tokens, but the batch has at most 3.
        let share = SPEC.share(Tokens { context: 490, generated: 10 });
        assert_eq!(share.as_micros(), 4900 + 10 * (1000 / 3 + 100) + 3);
        assert_eq!(SPEC.faster(2.0).share(Tokens { context: 490, generated: 0 }).as_micros(), 2450);
    }
}
