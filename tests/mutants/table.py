"""All mutants: from the API server to a write, then the other programs."""

from mutants.calling import CALLING
from mutants.deciding import DECIDING
from mutants.describing import DESCRIBING
from mutants.launching import LAUNCHING
from mutants.leading import LEADING
from mutants.mutant import Mutant
from mutants.reading import READING
from mutants.submitting import SUBMITTING
from mutants.working import WORKING

MUTANTS: tuple[Mutant, ...] = (
    *READING,
    *WORKING,
    *LEADING,
    *DECIDING,
    *LAUNCHING,
    *SUBMITTING,
    *CALLING,
    *DESCRIBING,
)
