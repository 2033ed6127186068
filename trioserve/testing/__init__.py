"""Fakes and the simulation, for tests of programs that use trioserve.

A worker without a model, a link without a socket, a whole engine on them, and virtual time.
Everything is public.

Imported by no other folder.
"""

from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.fake_faults import StepFails, WorkerDies
from trioserve.testing.fake_loop import serve_fake
from trioserve.testing.fake_model import adapter_shift, fake_logprob, fake_logprobs, hashed_token
from trioserve.testing.fake_worker import FakeWorker
from trioserve.testing.memory_link import MemoryLink, memory_link_pair

__all__ = [
    "FakeWorker",
    "MemoryLink",
    "StepFails",
    "WorkerDies",
    "adapter_shift",
    "fake_logprob",
    "fake_logprobs",
    "hashed_token",
    "memory_link_pair",
    "open_fake_engine",
    "serve_fake",
]
