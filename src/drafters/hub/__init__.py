"""Files from and to the Hub, and opening untrusted ones."""
