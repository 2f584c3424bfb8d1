"""Reports, HTML pages, dumps and profiles."""
