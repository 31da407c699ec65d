"""Reports as tables: lists of rows, each a list of cells, or a string that heads those after it."""

METRICS = {"em": ("EM", 3), "f1": ("F1", 3), "sd": ("SD", 2), "se": ("SE", 3), "osr": ("OSR", 3)}
LEGEND = """EM: exact match. F1: word overlap. SD: search depth, searches a question. SE: search
efficiency, EM / SD. OSR: over-search ratio, share with a right self-answer before the last one."""
AVERAGE = "average of the groups"  # in a comparison, beside the groups
REPORT_HEAD = " EM 95% F1 SD 95% SE OSR OSR_t0 valid tokens sec n".split(" ")


def number(value, digits=3):
    """A number as a cell; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def show(rows):
    """Print rows below what their columns mean."""
    print(f"{LEGEND}\n\n{as_text(rows)}")


def as_text(rows):
    """Rows as lines, the first column to the left, the others to the right."""
    columns = zip(*(row for row in rows if not isinstance(row, str)))
    widths, lines = [max(map(len, column)) for column in columns], []
    for row in rows:
        if not isinstance(row, str):
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
            row = "  ".join([row[0].ljust(widths[0]), *cells])
        lines.append(row)
    return "\n".join(lines)


def groups_of(result):
    """{(key, group): report} of the whole, as ("", "all"), and of every group."""
    groups = {("", "all"): result}
    for key, reports in result["by"].items():
        groups |= {(key, name): report for name, report in reports.items()}
    return groups


def label(key, name):
    """How a group is called in tables and figures."""
    if not key or name == AVERAGE or (key, name) == ("hops", "hard"):
        return name
    return f"needs {name}" if key == "hops" else f"{key} {name}"


def report_rows(result):
    """A report as rows: all questions, then every group."""
    rows = [REPORT_HEAD]
    for group, r in groups_of(result).items():
        (em_low, em_high), (sd_low, sd_high) = r["ci"]["em"], r["ci"]["sd"]
        row = [label(*group), number(r["em"]), f"{em_low:.3f}-{em_high:.3f}", number(r["f1"])]
        row += [number(r["sd"], 2), f"{sd_low:.2f}-{sd_high:.2f}"]
        row += [number(r[key]) for key in ("se", "osr", "osr_t0", "valid_action_ratio")]
        rows.append([*row, number(r["tokens"], 0), number(r["seconds"], 2), str(r["n"])])
    return rows


def depth_rows(depth):
    """Depth against need as rows."""
    rows = [["searches made", *next(iter(depth["matrix"].values()))]]
    for need, row in depth["matrix"].items():
        rows.append(["  " + label("hops", need), *map(str, row.values())])
    return rows


def depth_line(depth):
    """The summary of depth against need."""
    shares = f"fewer than needed {depth['under']:.3f}   as needed {depth['exact']:.3f}"
    shares += f"   more {depth['over']:.3f}   needless searches {depth['needless']:.2f}"
    return f"{shares}   rank correlation {number(depth['spearman'], 2)}"


def report_table(result):
    """A report as text: all questions, every group, then depth against need where it is known."""
    text, depth = as_text(report_rows(result)), result["depth"]
    return f"{text}\n\n{as_text(depth_rows(depth))}\n{depth_line(depth)}" if depth else text


def before_after_rows(result):
    """{"before": {"sampled": R, "greedy": R}, "after": the same} as rows of before -> after."""
    rows = [["", *(title for title, _ in METRICS.values()), "n"]]
    for decoding in ("sampled", "greedy"):
        reports = [result.get(moment, {}).get(decoding) for moment in ("before", "after")]
        sides = [groups_of(report) if report else {} for report in reports]
        if any(sides):
            rows.append(f"{decoding}, before -> after training")
        for group, r in (sides[1] or sides[0]).items():
            row = ["  " + label(*group)]
            for key, (_, digits) in METRICS.items():
                row.append(" -> ".join(number(s.get(group, {}).get(key), digits) for s in sides))
            rows.append([*row, str(r["n"])])
    return rows


def forced_rows(forced):
    """{depth: R}, the policy made to search so often, as rows: EM, then OSR, by depth and group."""
    rows = [["searches forced", *forced]]
    for key in ("em", "osr"):
        rows.append(METRICS[key][0])
        for group in groups_of(next(iter(forced.values()))):
            cells = [number(groups_of(report)[group][key]) for report in forced.values()]
            rows.append(["  " + label(*group), *cells])
    return rows
