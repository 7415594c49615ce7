"""What a study writes."""

from __future__ import annotations

from decentlam.lab.values import plain, table_text


def test_tables_are_markdown_and_values_plain():
    text = table_text([{"a_b": 1.23456, "c": None}])
    assert text == "| a b   | c |\n| ----- | - |\n| 1.235 | - |\n"
    assert plain({"x": (float("nan"), 1)}) == {"x": [None, 1]}
