"""Implements `privmix tune`, which recommends a protocol and its settings from public or set-aside text.

With `--private` it also chooses among the best ones on private held-out users, at a price that a ledger counts.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_json

from privmix.foundation.units import DELTA, EPSILON, TOKENS
from privmix.laboratory.evaluation.options import TUNED_PARTS, TUNED_RUN_TOKENS
from privmix.training.options import TokenBudget, TrainingOptions
from privmix_cluster.console import display
from privmix_cluster.option_groups import grouped
from privmix_cluster.options import CorpusOptions, DrawnOption, JsonOption
from privmix_cluster.parameters import bad

WARNING = (
    "The recommendation depends on the sample's text, and no ledger charges for it: tuning on the private text would "
    "cost privacy that is not counted. The sample must be public, or set aside for tuning and never trained on."
)
_TRAINING = TrainingOptions(block=128, batch=1, epochs=1)


@grouped
def tune(
    set_aside: Annotated[
        list[Path],
        typer.Option(
            help="A corpus, as for `privmix train`, that is public or set aside for tuning, never the private corpus; "
            "repeat for more files."
        ),
    ],
    reading: CorpusOptions,
    output: Annotated[Path, typer.Option(help="The output directory. An interrupted tuning continues there.")],
    epsilon: Annotated[float, typer.Option(help="The epsilon of the budget.")] = EPSILON,
    delta: Annotated[float, typer.Option(help="The delta of the budget.")] = DELTA,
    tokens: Annotated[int, typer.Option(help="The number of tokens that the budget must last for.")] = TOKENS,
    parts: Annotated[list[int], typer.Option(help="A number of parts to train; repeat for more.")] = list(TUNED_PARTS),  # noqa: B006
    base_share: Annotated[
        list[float],
        typer.Option(
            help="Also train a private base with this share of epsilon, and the largest number of parts on it; repeat "
            "for more."
        ),
    ] = [],  # noqa: B006
    ensemble: Annotated[
        list[Path],
        typer.Option(help="An ensemble of other set-aside text to use instead of training; repeat for more."),
    ] = [],  # noqa: B006
    private: Annotated[
        Path | None,
        typer.Option(
            help="A corpus of private held-out users. Their text decides among the best settings of the sample."
        ),
    ] = None,
    private_epsilon: Annotated[
        float | None, typer.Option(help="The epsilon that the choice on --private costs, with delta 0.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="The ledger of that choice: a SQLite file or a database URL.")
    ] = None,
    ledger_epsilon: Annotated[
        float | None, typer.Option(help="The epsilon of a new ledger, for all choices on the same users.")
    ] = None,
    private_corpus: Annotated[
        Path | None, typer.Option(help="The private corpus, to verify that the sample contains nothing of it.")
    ] = None,
    private_ensemble: Annotated[
        Path | None,
        typer.Option(help="The deployment's ensemble, to verify with its marks that the sample shares no text."),
    ] = None,
    salt_file: Annotated[
        Path | None, typer.Option(help="The salt of --private-ensemble, if it is not in its directory.")
    ] = None,
    runs: Annotated[
        int, typer.Option(min=1, help="The number of runs. They use different text if there is enough of it.")
    ] = 3,
    run_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"The number of tokens in a run. Default: --tokens, at most {TUNED_RUN_TOKENS}."),
    ] = None,
    drawn: DrawnOption = None,
    model: Annotated[str | None, typer.Option(help="The public model, as for `privmix train`.")] = None,
    any_guarantee: Annotated[
        bool, typer.Option("--any-guarantee", help="Also show methods with published or data-dependent guarantees.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Search for the parts, q, radius and protocol with the best perplexity at a budget, and count their model rows.

    The exit status is 0 if there is a recommendation, 2 if the input is invalid or the sample is private, 1 if a task
    failed, and 130 if the command was interrupted. Run it again to continue.
    """
    from privmix.laboratory.evaluation.private_choice import choose
    from privmix.laboratory.evaluation.tuning import tune as search
    from privmix_cluster.work.tune import (
        check_held_out,
        check_sample,
        plot_tuning,
        price_of_choice,
        show_choice,
        show_tuning,
        with_choice,
    )

    typer.echo(WARNING, err=True)
    sample = reading.corpus(set_aside)
    users = None if private is None else reading.corpus(private)
    price, charged = price_of_choice(private, private_epsilon, ledger, ledger_epsilon)
    if base_share and ensemble:
        raise bad("base-share", "trains bases; leave it out with --ensemble, which can be on bases")
    check_sample(sample, [path for path in (private_corpus, private) if path], private_ensemble, salt_file, ensemble)
    if users is not None:
        check_held_out(users, private_ensemble, salt_file, ensemble)
    tuning = search(
        sample,
        output,
        TokenBudget(epsilon=epsilon, delta=delta, tokens=tokens),
        parts=parts,
        base_shares=base_share,
        ensembles=ensemble,
        runs=runs,
        run_tokens=run_tokens,
        drawn=drawn,
        model=model,
        training=_TRAINING,
        any_guarantee=any_guarantee,
        display=partial(display, as_json),
    )
    text = to_json(tuning, indent=2, inf_nan_mode="null").decode()
    (output / "tuning.json").write_text(text)
    plot_tuning(tuning, output / "tuning.png")
    chosen = None
    if users is not None:
        chosen = choose(
            tuning,
            users,
            output,
            epsilon=price,
            ledger=charged,
            budget=ledger_epsilon,
            display=partial(display, as_json),
        )
    if as_json:
        print(text if chosen is None else with_choice(text, chosen))
        return
    show_tuning(tuning, output)
    if chosen is not None:
        show_choice(chosen, tuning)
