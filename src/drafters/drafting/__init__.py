"""Growing a draft from any drafter: chain, tree, reduced vocabulary."""
