"""All names at once, where programs for `dynamo._core` look for them."""

from __future__ import annotations

import logging

from kvasir._native import get_reasoning_parser_names as get_reasoning_parser_names
from kvasir._native import get_tool_parser_names as get_tool_parser_names
from kvasir.exceptions import *  # noqa: F403
from kvasir.llm import *  # noqa: F403
from kvasir.runtime import *  # noqa: F403
from kvasir.runtime import Stream

AsyncResponseStream = Stream


def log_message(level: str, message: str, module: str, file: str, line: int) -> None:
    """Writes a log line as if `module` had written it at that place; `level` is trace, debug, info, warn or error."""
    severity = {"trace": logging.DEBUG, "warn": logging.WARNING}.get(level.lower()) or logging.getLevelName(level.upper())
    logger = logging.getLogger(module)
    if isinstance(severity, int) and logger.isEnabledFor(severity):
        logger.handle(logger.makeRecord(module, severity, file, line, message, (), None))
