// Words of charts, legends and trees that lie on each other, or leave their boxes.
const touching = [];
const apart = (p, q) =>
  p.right <= q.left + 0.5 || q.right <= p.left + 0.5 || p.bottom <= q.top + 0.5 || q.bottom <= p.top + 0.5;
for (const figure of document.querySelectorAll("figure, .legend, .pick, .tree svg")) {
  const words = ".name, .value, li, .x span, .y span, h3, p, summary, button, rect[rx]";
  const boxes = [...figure.querySelectorAll(words)]
    .filter((e) => e.textContent.trim() || e.matches("rect"))
    .map((e) => [e, e.getBoundingClientRect()])
    .filter(([, box]) => box.width && box.height);
  boxes.forEach(([a, p], i) =>
    boxes.slice(i + 1).forEach(([b, q]) => {
      if (!apart(p, q) && !a.contains(b) && !b.contains(a)) touching.push([a.textContent, b.textContent]);
    }),
  );
}
for (const node of document.querySelectorAll(".node")) {
  const box = node.querySelector("rect").getBoundingClientRect();
  const words = [...node.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
  if (words.some((w) => w.left < box.left || w.right > box.right)) touching.push([node.textContent, "leaves its box"]);
  if (words.length > 1 && words[0].right > words[1].left) touching.push([node.textContent, "its score"]);
}
return touching;
