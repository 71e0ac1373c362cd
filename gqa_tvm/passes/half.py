"""float16 on targets that have no instructions for it."""

from __future__ import annotations

from tvm import tirx

from ..definitions.half import float16_to_float32, float32_to_float16
from .functions import rewrite_bodies


def float16_by_integers():
    """Replace casts from and to float16, for targets without instructions for them."""

    def rewrite_cast(cast):
        source, target = str(cast.value.ty), str(cast.ty)
        if source == "float16" and target == "float32":
            return float16_to_float32(tirx.reinterpret("uint16", cast.value))
        if source == "float32" and target == "float16":
            return tirx.reinterpret("float16", float32_to_float16(cast.value))
        return cast

    return rewrite_bodies((tirx.Cast, rewrite_cast))
