"""Every case of bad_inputs is refused with its message and exit code; bash tests/bad_inputs.sh shows them."""

import pytest

from . import bad_inputs


@pytest.fixture(scope="module", autouse=True)
def prepared():
    bad_inputs.prepare()


@pytest.mark.parametrize("case", bad_inputs.CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_refused(case):
    code, printed = bad_inputs.run(case)
    problem = bad_inputs.verdict(case, code, printed)
    assert problem is None, f"{problem}\n{printed}"
