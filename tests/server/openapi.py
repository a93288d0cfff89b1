"""Requests made from a server's OpenAPI document, right and wrong ones, whose answers must be as it describes them."""

import contextlib

import hypothesis
import schemathesis


def check_answers(document, max_examples, *, headers=None, paths=None):
    """Asks each operation, or those of some paths; returns the statuses of the answers."""
    settings = hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    # A schema cannot say everything: that top_logprobs needs logprobs, for one.
    excluded = [schemathesis.checks.positive_data_acceptance]
    statuses = set()
    for result in document.get_all_operations():
        operation = result.ok()
        if paths is not None and operation.path not in paths:
            continue
        for mode in schemathesis.GenerationMode:

            @settings
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def call(case):
                response = case.call(headers=headers, timeout=60)
                statuses.add(response.status_code)
                # A body that is too large is refused before it is known what else is wrong with it.
                too_large = [schemathesis.checks.negative_data_rejection] * (response.status_code == 413)
                case.validate_response(response, excluded_checks=excluded + too_large)

            with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing can be wrong about a plain GET
                call()
    return statuses
