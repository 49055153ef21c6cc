"""Download from and upload to the Hub; open untrusted files."""
