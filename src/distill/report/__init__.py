"""Tables, the terminal summary, report.html, and comparison of runs."""
