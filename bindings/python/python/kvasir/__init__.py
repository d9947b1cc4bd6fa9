"""KV-cache-aware routing of LLM requests.

`Router` is the brain as a plain object, for programs with a gateway of their own: workers in, events in, decisions with their terms out.
`kvasir.llm` and `kvasir.runtime` have the names of `dynamo.llm` and `dynamo.runtime`, `kvasir.exceptions` what can go wrong; `replay` simulates a trace under several policies. The command `kvasir` comes with the wheel.
"""

from __future__ import annotations

from kvasir._core import Candidate, Decision, Router, __version__
from kvasir._replay import Replay, replay
from kvasir.exceptions import *  # noqa: F403
from kvasir.exceptions import __all__ as _exceptions
from kvasir.llm import *  # noqa: F403
from kvasir.llm import __all__ as _llm
from kvasir.runtime import *  # noqa: F403
from kvasir.runtime import __all__ as _runtime

__all__ = sorted({"Candidate", "Decision", "Replay", "Router", "__version__", "replay", *_exceptions, *_llm, *_runtime})  # pyright: ignore[reportUnsupportedDunderAll]
