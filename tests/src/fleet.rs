//! Replicas as they are deployed: each a backend behind its agent.

use std::net::SocketAddr;

use anyhow::Result;

use crate::agent::{Agent, AgentOptions};
use crate::backend::Backend;
use crate::reply::Reply;
use crate::runtime::eventually;

/// One backend and the agent in front of it.
pub struct Replica {
    /// The agent, to which Envoy connects.
    pub agent: Agent,
    /// The backend, to which only the agent connects.
    pub backend: Backend,
}

impl Replica {
    /// Starts a backend that answers with `reply`, and an agent with `options` in front of it.
    pub fn start_with(reply: Reply, options: &AgentOptions) -> Result<Self> {
        let backend = Backend::start(reply)?;
        Ok(Self { agent: Agent::start_with(backend.addr(), options)?, backend })
    }

    /// The address that Envoy uses.
    pub fn addr(&self) -> SocketAddr {
        self.agent.addr()
    }
}

/// Several replicas.
pub struct Fleet(Vec<Replica>);

impl Fleet {
    /// Starts one replica for each reply. The replica answers every request with that reply.
    pub fn start(replies: impl IntoIterator<Item = Reply>) -> Result<Self> {
        Self::start_with(replies, &AgentOptions::default())
    }

    /// Like [`Self::start`], with `options` for every agent.
    pub fn start_with(replies: impl IntoIterator<Item = Reply>, options: &AgentOptions) -> Result<Self> {
        replies.into_iter().map(|reply| Replica::start_with(reply, options)).collect::<Result<_>>().map(Self)
    }

    /// Starts `count` replicas that answer with `reply`.
    pub fn uniform(count: usize, reply: &Reply) -> Result<Self> {
        Self::start(std::iter::repeat_n(reply.clone(), count))
    }

    /// The addresses that Envoy uses, in order.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.0.iter().map(Replica::addr).collect()
    }

    /// Number of requests that each backend got, in order.
    pub fn served(&self) -> Vec<u64> {
        self.0.iter().map(|replica| replica.backend.served()).collect()
    }

    /// Resets all counts of the backends to zero.
    pub fn clear(&self) {
        self.0.iter().for_each(|replica| replica.backend.clear());
    }

    /// Waits until no agent has a request in flight; panics after five seconds.
    #[track_caller]
    pub fn assert_idle(&self) {
        for replica in &self.0 {
            eventually(
                "requests in flight are zero on every agent",
                std::time::Duration::from_secs(5),
                || replica.agent.rif().is_ok_and(|rif| rif == 0).then_some(()),
            );
        }
    }
}

impl std::ops::Deref for Fleet {
    type Target = [Replica];

    fn deref(&self) -> &[Replica] {
        &self.0
    }
}

impl std::ops::DerefMut for Fleet {
    fn deref_mut(&mut self) -> &mut [Replica] {
        &mut self.0
    }
}
