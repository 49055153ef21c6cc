"""Download from and upload to the Hub; open untrusted files."""

# Files of a published folder beside its weights. Named here, where no import is slow.
SCORECARD = "scorecard.json"
RECIPE = "recipe.json"
NOTES = (SCORECARD, RECIPE)
PASSPORT, PASSPORT_PAGE = "passport.json", "passport.md"
