"""Options of every command as frozen dataclasses: what constructors and functions are given."""
