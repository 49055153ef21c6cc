"""Build drafts from a drafter's logits: chains, trees and their unions, reduced vocabularies."""
