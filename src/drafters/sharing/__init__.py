"""Drafters on their way from one person to another: what is read with distrust, said, and uploaded."""
