"""The style sheet of pages: one column, light and dark, from 390 pixels up."""

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark; --ground: #fbfaf8; --text: #22262b; --soft: #5f6770;
  --line: #e2dfd9; --panel: #f3f1ec; --accent: #ad4317; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --text: #e4e2de; --soft: #a3abb3;
  --line: #30343a; --panel: #1e2126; --accent: #f08a55; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 17px/1.6 "Charter", "Iowan Old Style", "Source Serif 4", Georgia, serif; }
main { max-width: 940px; margin: 0 auto; padding: 56px 28px 72px; overflow-wrap: break-word; }
h1, h2, h3, .family, .cards, table, figcaption, dl, header p, nav, summary, .more {
  font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 40px; line-height: 1.1; letter-spacing: -0.02em; margin: 0 0 10px; }
header p { color: var(--soft); font-size: 18px; margin: 0; max-width: 44em; }
a { color: var(--accent); text-underline-offset: 2px; text-decoration-thickness: 1px; }
nav { margin-top: 30px; font-size: 16px; }
nav ol { margin: 0; padding-left: 1.3em; line-height: 1.8; }
nav span { color: var(--soft); font-size: 14px; white-space: nowrap; }
section { margin-top: 52px; border-top: 1px solid var(--line); padding-top: 30px; }
.family { margin: 0; color: var(--accent); font-weight: 650; font-size: 14px;
  letter-spacing: 0.04em; }
h2 { font-size: 27px; line-height: 1.2; letter-spacing: -0.01em; margin: 4px 0 14px; }
h3 { font-size: 15px; margin: 0 0 10px; }
p { max-width: 42em; }
.cards { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: 12px;
  margin: 26px 0; }
.cards div { background: var(--panel); border-radius: 10px; padding: 14px 16px; }
.cards b { display: block; font-size: 24px; line-height: 1.2; letter-spacing: -0.02em;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: 14px; line-height: 1.35; display: block;
  margin-top: 4px; }
.cards div:last-child b { color: var(--accent); }
.formula { background: var(--panel); border-radius: 10px; padding: 16px 22px; margin: 24px 0;
  font-size: 18px; line-height: 1.8; }
.formula span { display: inline-block; margin-right: 28px; }
figure { margin: 30px 0; }
img { width: 100%; max-width: 100%; display: block; }
figcaption { color: var(--soft); font-size: 14px; line-height: 1.45; margin-top: 8px; }
.table { margin: 26px 0; }
.table figcaption { margin: 0 0 8px; max-width: 60em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 15px; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 0 7px 20px; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: baseline; }
th { font-weight: 600; color: var(--soft); font-size: 14px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
.best td { font-weight: 650; color: var(--accent); }
code { font-size: 0.85em; }
pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { background: var(--panel); border-radius: 10px; padding: 16px 20px; overflow-x: auto;
  font-size: 13.5px; line-height: 1.55; margin: 18px 0; }
pre b { font-weight: 600; color: var(--accent); }
pre i { color: var(--soft); font-style: normal; }
details { border: 1px solid var(--line); border-radius: 10px; padding: 10px 18px; margin: 14px 0; }
summary { cursor: pointer; font-size: 15px; }
.more { font-size: 15px; margin-top: 26px; }
footer { margin-top: 56px; border-top: 1px solid var(--line); padding-top: 26px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 24px; margin: 0;
  font-size: 14px; }
dt { color: var(--soft); }
dd { margin: 0; min-width: 0; }
@media (max-width: 640px) {
  main { padding: 32px 20px 48px; }
  h1 { font-size: 32px; }
  h2 { font-size: 24px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 10px; }
  .cards div { padding: 12px 14px; }
  .cards b { font-size: 22px; }
  .formula { padding: 14px 16px; font-size: 16px; }
  img { max-width: 480px; }
  table { font-size: 14px; }
  th, td { padding-left: 10px; white-space: normal; }
  pre { padding: 14px; font-size: 13px; }
  details { padding: 8px 12px; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 8px; }
}
"""
