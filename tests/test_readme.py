"""The README's example runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path


def test_example_runs(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(examples) == 1
    exec(compile(examples[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("(1, 1, 2048) ('append_f32_i8_h128'")
