"""Tuning of block sizes with MetaSchedule: needs apache-tvm, xgboost and a C compiler; inference never imports it."""
