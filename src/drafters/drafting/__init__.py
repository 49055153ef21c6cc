"""Build drafts: chains, trees and their unions, and the tables and searches that they are looked up in."""
