"""``python -m paro_advise.advisor`` is ``paro-advise``."""

from paro_advise.advisor.cli import main

main()
