"""AVX-512: the generic schedules with this target's block sizes."""

from .generic import *  # noqa: F403
