"""The queue of measurements that need a GPU: its steps, results, pages, and a folder to take along."""
