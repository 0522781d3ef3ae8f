"""What the pages share: the sidebar, widgets made from plans, views of a breakdown, links and downloads."""
