"""How much any drafter could have accepted, and how much a drafter does."""
