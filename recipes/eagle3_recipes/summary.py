"""The end of a sweep: its table, CSV, JSON and plots, from whatever runs are done."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from eagle3.errors import ConfigError
from eagle3.files import replace_file, write_json
from eagle3_recipes.plan import Options, PlannedRun
from eagle3_recipes.plots import draw
from eagle3_recipes.results import Record, records, result, unmeasured
from eagle3_recipes.sweep import Sweep
from eagle3_recipes.table import inference_table, training_table, write_csv


def show(sweep: Sweep, options: Options, runs: Sequence[PlannedRun]) -> None:
    """Print the table; write NAME.txt, NAME.csv, NAME.json and, with matplotlib, NAME.png beside the runs' folder."""
    results = [_known(run) for run in runs]
    rows = records(results)
    table = training_table(results, sweep.idle) if sweep.trains else inference_table(rows, sweep.idle)
    options.output.mkdir(parents=True, exist_ok=True)
    # a name may hold a dot, as with_suffix would not know
    text, csv, picture = (options.output / f"{sweep.name}.{kind}" for kind in ("txt", "csv", "png"))
    with replace_file(text) as file:
        file.write(f"{sweep.question}\n\n{table}\n")
    write_json(
        options.output / f"{sweep.name}.json", {"sweep": sweep.name, "question": sweep.question, "runs": results}
    )
    write_csv(rows, csv)
    print(f"\n{table}\n\n{csv}")
    print(_drawn(sweep, rows, picture))


def _known(run: PlannedRun) -> Record:
    try:
        return result(run)
    # one record that cannot be read is not to take the others' table away
    except (ConfigError, OSError) as error:
        print(f"{run.name}: {error}")
        return unmeasured(run)


def _drawn(sweep: Sweep, rows: Sequence[Record], picture: Path) -> str:
    """Draw the picture, and say where it is or why there is none."""
    try:
        if find_spec("matplotlib") is None:
            why = "matplotlib is not installed (pip install '.[plot]')"
        elif draw(sweep, rows, picture):
            return str(picture)
        else:
            why = "nothing to show yet"
    except ConfigError as error:
        why = str(error)
    # an earlier one would be taken for this table's
    picture.unlink(missing_ok=True)
    return f"no plot: {why}"
