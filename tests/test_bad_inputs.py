"""Every case of bad_inputs is refused with its message and exit code; bash tests/bad_inputs.sh shows them."""

import pytest

from .bad_inputs import CASES, run, verdict


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_refused(case):
    code, printed = run(case)
    problem = verdict(case, code, printed)
    assert problem is None, f"{problem}\n{printed}"
