// Words whose contrast with what is behind them (WCAG 2) is below 4.5: [ratio, class and words].
const rgb = (colour) => colour.match(/[\d.]+/g).map(Number);
const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
const light = (colour) => {
  const [r, g, b] = rgb(colour).map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (rgb(colour)[3] !== 0) return colour;
  }
  return "rgb(255, 255, 255)";
};
const found = [];
const words =
  ".tok, .counts, .notes li, figcaption p, td, th, .x span, .y span, button:not(:disabled), .banner, dt, dd";
for (const e of document.querySelectorAll(words)) {
  if (e.textContent.trim()) found.push([ratio(getComputedStyle(e).color, behind(e)), `${e.className} ${e.textContent}`]);
}
for (const node of document.querySelectorAll(".node")) {
  const fill = getComputedStyle(node.querySelector("rect")).fill;
  for (const text of node.querySelectorAll("text")) {
    found.push([ratio(getComputedStyle(text).fill, fill), node.getAttribute("class")]);
  }
}
return found.filter(([r]) => r < 4.5);
