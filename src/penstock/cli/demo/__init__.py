"""``penstock demo``: profile, plan, prove, train and report a small GPT on local processes."""
