"""AVX2 with FMA: the generic schedules with this target's block sizes."""

from .generic import *  # noqa: F403
