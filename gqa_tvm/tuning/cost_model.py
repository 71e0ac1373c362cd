"""MetaSchedule's XGBoost cost model, made to converge."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBConfig, XGBModel
from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

# The model is random before so many measurements.
_WARM_UP = 16
_DEFAULT_ETA = 0.2


def converging_config(rows: int) -> XGBConfig:
    """Settings for programs of so many feature rows.

    The prediction of a program is the sum over its rows, so a boosting step moves it by eta x rows: above 2 the error
    grows with every step. 1 / rows makes a step as large as the error.
    """
    return XGBConfig(eta=min(_DEFAULT_ETA, 1.0 / rows), nthread=1)


def feature_rows(context: ms.TuneContext, schedule: tvm.s_tir.Schedule) -> int:
    """Rows of a schedule's features: one for each store to a buffer."""
    candidate = ms.MeasureCandidate(schedule, ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=False))
    return int(PerStoreFeature().extract_from(context, [candidate])[0].shape[0])


def make_cost_model(name: str, context: ms.TuneContext, schedule: tvm.s_tir.Schedule) -> Any:
    """ "xgb" or "random"."""
    if name == "random":
        return ms.cost_model.RandomModel()
    return XGBModel(config=converging_config(feature_rows(context, schedule)), num_warmup_samples=_WARM_UP)
