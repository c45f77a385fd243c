"""An engine whose server is a function of the test."""

from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from megatron_rl.sidecar.vllm.answers import Limits
from megatron_rl.sidecar.vllm.engine import VllmEngine


def connect(answer: Callable[[httpx.Request], Any]) -> VllmEngine:
    """Make an engine whose server answers in this way."""
    engine = VllmEngine("engine-0", "/nowhere")
    engine.limits = Limits(max_model_len=8, max_num_seqs=1, vocab_size=9)
    engine._connection._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://engine")
    return engine


def connect_always(answer: Any) -> VllmEngine:
    return connect(lambda request: reply(answer))


def reply(answer: Any) -> httpx.Response:
    return httpx.Response(200, content=msgspec.msgpack.encode(answer))
