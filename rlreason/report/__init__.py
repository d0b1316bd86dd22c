"""Turn runs into verdicts: `report` and `compare`, in the terminal, as a page and as Markdown. No torch."""
