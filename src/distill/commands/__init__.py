"""Commands of `foredraft` other than training and exporting."""
