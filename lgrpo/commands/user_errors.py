"""Which errors are mistakes of the user, whose message is enough."""

from __future__ import annotations

import traceback
from pathlib import Path


def is_user_error(error: Exception) -> bool:
    """Return whether the message of an error is enough for the user, so that the traceback can be left out.

    This holds if a ``raise`` statement of lgrpo raised the error. An error with a cause must also be a ``ValueError``
    or ``OSError``, which lgrpo raises for mistakes in settings, data and files; others need their traceback.
    """
    if error.__cause__ is not None and not isinstance(error, ValueError | OSError):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).is_relative_to(Path(__file__).parents[1]) and (frame.line or "").startswith("raise")
