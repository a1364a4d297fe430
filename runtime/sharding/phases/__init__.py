"""The phases of a step: gradients are reduced, rows find their owner, updates are published, edits followed."""
