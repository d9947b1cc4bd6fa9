"""`kvasir.exceptions`, where programs for `dynamo.llm.exceptions` look for them."""

from __future__ import annotations

from kvasir.exceptions import *  # noqa: F403
from kvasir.exceptions import __all__ as __all__
