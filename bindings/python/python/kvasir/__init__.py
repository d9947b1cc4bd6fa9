"""KV-cache-aware routing of LLM requests.

`Router` is the brain as a plain object, for programs with a gateway of their own: workers in, events in, decisions with their terms out.
`kvasir.llm` and `kvasir.runtime` have the names of `dynamo.llm` and `dynamo.runtime`, `kvasir.exceptions` what can go wrong; `replay` simulates a trace under several policies. The command `kvasir` comes with the wheel.
"""

from __future__ import annotations

from kvasir._native import Candidate as Candidate
from kvasir._native import Decision as Decision
from kvasir._native import Router as Router
from kvasir._native import __version__ as __version__
from kvasir._replay import Replay as Replay
from kvasir._replay import replay as replay
from kvasir.exceptions import *  # noqa: F403
from kvasir.llm import *  # noqa: F403
from kvasir.runtime import *  # noqa: F403
