"""What happens in every process of a job that ``paro-advise capture`` or ``run`` started."""
