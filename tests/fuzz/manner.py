"""The manner in which a call is made: modes and defaults of torch, what operators remember, and replays.

None of it may change what a call gives, or whether it is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_map
from tsmla.loading import resolve

from .guarded import Guarded
from .places import Place
from .plain import Plain

Arranged = tuple[dict[str, Guarded], dict[str, Any]]
"""The memory of a call by name, and its arguments."""


@dataclasses.dataclass(frozen=True, repr=False)
class Manner(Plain):
    """How a call is made. made, called: in inference mode, its tensors and the call itself. dtype: torch's default one.
    device: whether the GPU is torch's default device. cold: nothing is remembered of earlier calls. replayed: the same
    call was made before, when its memory held zeros; on a GPU as a captured graph that is then replayed."""

    made: bool = False
    called: bool = False
    dtype: str = "float32"
    device: bool = False
    cold: bool = False
    replayed: bool = False

    def arrange(self, arranged: Callable[[], Arranged]) -> Arranged:
        """Make a call's memory."""
        with torch.inference_mode(self.made):
            return arranged()

    def call(
        self, place: Place, operator: Callable[..., Any], memory: dict[str, Guarded], given: dict[str, Any]
    ) -> Any:
        """Make a call, wait for it, and return what it gives."""
        if self.cold:
            resolve.calls.clear()
        if self.replayed:
            for guarded in memory.values():
                guarded.blank()
            replay = self._captured if place.device else self._called
            result = replay(operator, given, lambda: [guarded.restore() for guarded in memory.values()])
        else:
            with self.modes():
                result = operator(**given)
        torch.cuda.synchronize()
        return result

    def _called(self, operator: Callable[..., Any], given: dict[str, Any], restore: Callable[[], Any]) -> Any:
        with self.modes():
            operator(**given)
        torch.cuda.synchronize()
        restore()
        with self.modes():
            return operator(**given)

    def _captured(self, operator: Callable[..., Any], given: dict[str, Any], restore: Callable[[], Any]) -> Any:
        """Call once, so that everything is loaded, and capture the second call, which runs when it is replayed."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), self.modes():
            operator(**given)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph), self.modes():
            result = operator(**given)
        restore()
        graph.replay()
        torch.cuda.synchronize()
        return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, result)

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Put torch into the modes of a call."""
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.inference_mode(self.called))
                if self.device:
                    stack.enter_context(torch.device("cuda"))
                yield
        finally:
            torch.set_default_dtype(dtype)


@st.composite
def manners(draw: Any) -> Manner:
    """Draw one that is usual in most ways."""
    return Manner(
        made=draw(st.sampled_from((False, False, True))),
        called=draw(st.sampled_from((False, False, True))),
        dtype=draw(st.sampled_from(("float32", "float32", "float64", "float16", "bfloat16"))),
        device=draw(st.sampled_from((False, False, True))),
        cold=draw(st.booleans()),
        replayed=draw(st.sampled_from((False,) * 5 + (True,))),
    )
