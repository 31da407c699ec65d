"""What eval.py prints, draws and writes; and which of its options go together."""

from pathlib import Path

from plumbing import compare, figures, page, show, tables
from plumbing.files import check, check_writable, on_failure, read_json, write_json
from plumbing.runs import HELD_OUT


def check_options(args):
    """Refuse options that cannot work or do not go together. Raises DataError."""
    ways = ("compare", "curves", "ask", "trajectories")
    given = [f"--{name}" for name in ways if getattr(args, name) is not None]
    check(len(given) < 2, " ".join(given), "one way of looking at a time")
    greedy = args.samples > 1 and args.temperature == 0
    check(not greedy, f"--samples {args.samples}", "needs a --temperature above 0")
    check(not args.where or args.show or args.html, "--where", "is for --show N or --html")
    check(not args.gold or args.ask, "--gold", "is for --ask")
    check(args.ask is None or args.ask.strip(), "--ask", "the question is blank")
    is_figure = Path(args.figure or "x.png").suffix in (".png", ".svg")
    check(is_figure, f"--figure {args.figure}", "the name of a figure ends in .png or .svg")
    for name in ("out", "html", "figure"):
        check_writable(f"--{name}", getattr(args, name))


def check_names(args, questions):
    """Refuse a --where or --by that speaks of what no question has. Raises DataError."""
    known = {key for question in questions for key in question["metadata"]}
    for key in args.by or []:
        check(key in known, f"--by {key}", "no question has it in its metadata")
    if args.where:
        show.holds(args.where, dict.fromkeys({*known, *show.NAMES}))


def save_reports(args, reports, out, saved, is_own):
    """Print {depth: R}, add it to what `out` has `saved`, and return it as sections of a page.
    is_own: `out` is a run's eval.json, which holds "before" and "after" training too."""
    name, decoding = Path(args.run or args.model).name, "sampled" if args.temperature else "greedy"
    if args.force_depth:
        write_json(out, saved | {"forced": reports})
        tables.show(tables.forced_rows(reports))
        print(f"report: {out}")
        figure = args.figure or out.with_name("forced_depth.png")
        figures.plot_forced(reports, figure, name)
        print(f"figure: {figure}")
        return page.forced(reports, name)
    result = reports["None"]
    new = {"eval": saved.get("eval", {}) | {decoding: result}} if is_own else {decoding: result}
    write_json(out, saved | new)
    rules = ", F1 by HotpotQA's rules" if args.hotpot_rules else ""
    sections = print_report(result, f"{result['n']} questions, {decoding}{rules}")
    print(f"report: {out}")
    return sections


def print_report(result, heading):
    """Print a report, and return it as sections of a page."""
    print(f"{heading}\n{tables.LEGEND}\n\n{tables.report_table(result)}")
    return [page.report(result, heading)]


def show_trajectories(args, pairs, sections, latest=False):
    """Print --show trajectories, from all over or the `latest`, and write the page."""
    if pairs and (args.show or args.html):
        chosen, count = show.choose(pairs, args.where), args.show or 10
        chosen = chosen[-count:] if latest else show.spread(chosen, count)
        articles = {"heading": "Trajectories", "note": show.VERDICTS}
        sections = [*sections, articles | {"articles": page.cases({"": chosen})}]
        if args.show:
            texts = [show.render_trajectory(*pair) for pair in chosen]
            print(show.RULE.join([f"\n{show.VERDICTS}", *texts]))
    if args.html:
        check(sections, args.run, "there is nothing to show yet")
        page.write(args.html, Path(args.run or args.trajectories or args.model).name, sections)


def compare_runs(args, read_trajectories):
    """`--compare` and `--curves`: tables, figures, the case study, a page."""
    run_dirs = args.compare or args.curves
    beside = Path(run_dirs[0]).parent  # of runs of one's own; shipped ones are left as they are
    beside = beside if Path("runs").resolve() in Path(run_dirs[0]).resolve().parents else Path()
    figure = args.figure or beside / ("compare.png" if args.compare else "curves.png")
    with on_failure(f"{', '.join(run_dirs)}: a damaged file", but=[OSError]):
        if args.curves:
            figures.plot_curves(run_dirs, figure)
            return print(figure)
        arms = compare.load_arms(run_dirs)
        reports = [args.reference] if args.reference else [f"{run}/eval.json" for run in run_dirs]
        found = [read_json(path).get("forced") for path in reports]
        forced = next(filter(None, found), None)
        is_there = forced or not args.reference
        check(is_there, f"--reference {args.reference}", "no report of --force_depth")
        rows = compare.compare_rows(arms)
        tables.show(rows)
        figures.plot_compare(arms, figure, forced)
        print(figure)
        cases, have_cases = {}, all((Path(run) / HELD_OUT).exists() for run in run_dirs)
        if args.show or (args.html and have_cases):
            cases = compare.side_by_side(run_dirs, read_trajectories, args.show or 3, args.where)
        for pairs in zip(*cases.values()) if args.show else ():
            texts = [show.render_trajectory(*pair) for pair in pairs]
            texts = [f"{name}\n\n{text}" for name, text in zip(cases, texts)]
            print(show.RULE.join([f"\n{show.VERDICTS}", *texts]))
        if args.html:
            sections = [page.figure("Accuracy against depth", figures.plot_compare, arms, forced)]
            sections.append({"heading": "Mean and standard deviation over seeds", "rows": rows})
            if cases:
                articles = {"heading": "The same questions, side by side", "note": show.VERDICTS}
                sections.append(articles | {"articles": page.cases(cases)})
            page.write(args.html, "Comparison", sections)
