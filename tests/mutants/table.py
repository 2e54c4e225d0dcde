"""All of them, along the way from the API server to a write."""

from mutants.deciding import DECIDING
from mutants.mutant import Mutant
from mutants.reading import READING
from mutants.working import WORKING

MUTANTS: tuple[Mutant, ...] = (*READING, *WORKING, *DECIDING)
