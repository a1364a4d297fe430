"""``python -m paro_advise`` is ``paro-advise``."""

from paro_advise.advisor.cli import main

main()
