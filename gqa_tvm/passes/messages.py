"""What a kernel says of an argument that does not fit."""

from __future__ import annotations

import tvm
from tvm import tirx

from .functions import rewrite_bodies


def short_messages():
    """Let a kernel's checks of an argument fail with one message, the number of the argument and the signature.

    MakePackedAPI gives each of its 150 checks a text of its own; what reports them is a quarter of a kernel's code.
    """

    def shorten(check):
        parts = list(check.message_parts)
        texts = [part.value for part in parts]
        numbers = [i + 1 for i, text in enumerate(texts) if text.endswith("argument #")]
        if not numbers:
            return check
        signature = max(texts, key=len)
        message = ("Mismatched argument #", texts[numbers[0]], " of ", signature)
        kind, *message = map(tvm.ir.StringImm, ("TypeError", *message))
        return tirx.AssertStmt(check.condition, kind, message)

    return rewrite_bodies((tirx.AssertStmt, shorten))
