"""Pages that follow from scorecards: claims of papers, and tables of results."""
