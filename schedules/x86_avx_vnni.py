"""AVX2 with AVX-VNNI: int8 and int4 by integer dot products of 256 bits where that is faster, else as AVX2."""

from .x86_avx512_vnni import *  # noqa: F403
