"""From runs to a verdict: the verbs `report` and `compare`, in the terminal, as a page and as Markdown. No torch."""
