"""plumbing/tables.py: reports as text."""

from builders import reports

from plumbing import tables


def test_tables_fit_a_terminal():
    both = {"before": reports(3), "after": reports(1, 0.75)}
    text = tables.as_text(tables.before_after_rows(both))
    assert max(map(len, text.splitlines())) <= 100
    rows = [line for line in text.splitlines() if line.strip().startswith("needs 2")]
    assert len(rows) == 2 and rows[0].endswith(" 4")
    assert "1.000 -> 0.750" in rows[0] and "3.00 -> 1.00" in rows[0]
    killed = {"before": reports(3)}  # before the end
    assert "3.00 -> -" in tables.as_text(tables.before_after_rows(killed))
    text = tables.report_table(reports(2)["greedy"])
    assert max(map(len, text.splitlines())) <= 100 and "needless searches 0.50" in text


def test_columns_are_aligned():
    rows = [["", "EM"], "a heading that is as long as it likes to be", ["needs 1", "0.5"]]
    assert tables.as_text(rows).splitlines() == ["          EM", rows[1], "needs 1  0.5"]
    assert tables.number(None) == "-" and tables.number(2 / 3, 1) == "0.7"


def test_forced_rows():
    forced = {str(depth): reports(depth)["greedy"] for depth in (0, 2)}
    rows = tables.forced_rows(forced)
    assert rows[0] == ["searches forced", "0", "2"] and rows[1] == "EM"
    assert rows[2] == ["  all", "1.000", "1.000"]
    assert [row[0] for row in rows[2:6]] == ["  all", "  needs 1", "  needs 2", "  hard"]
