"""What the open questions and essays are about: names and notions of many fields."""


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";"))


PEOPLE = _list(
    "Marie Curie; Isaac Newton; Cleopatra; Leonardo da Vinci; Nelson Mandela; Albert Einstein; Jane Austen; "
    "Napoleon Bonaparte; Ada Lovelace; Mahatma Gandhi; Ludwig van Beethoven; Frida Kahlo; Charles Darwin; "
    "Florence Nightingale; Julius Caesar; Martin Luther King; Amelia Earhart; Galileo Galilei; Rosa Parks; "
    "Vincent van Gogh; Queen Victoria; Nikola Tesla; Socrates; Mozart; Abraham Lincoln; Joan of Arc; "
    "Christopher Columbus; Alan Turing; Mother Teresa; Alexander the Great; Pablo Picasso; Anne Frank; "
    "Winston Churchill; Genghis Khan; Simon Bolivar; Confucius; Neil Armstrong; Louis Pasteur; Plato; "
    "Michelangelo; Thomas Edison; George Washington; Marco Polo; Aristotle; Charlie Chaplin; Pythagoras; "
    "Ernest Hemingway; Bob Marley; Elizabeth the First; Sigmund Freud; Karl Marx; Stephen Hawking"
)
PLACES = _list(
    "Australia; Brazil; India; Mexico; Egypt; Iceland; Thailand; Morocco; Sweden; South Africa; Vietnam; "
    "Argentina; New Zealand; Turkey; Indonesia; Nigeria; Ukraine; Peru; Switzerland; Hawaii; Alaska; Texas; "
    "California; Florida; Scotland; the Sahara; the Amazon rainforest; the Nile; Mount Everest; Antarctica; "
    "the Great Barrier Reef; the Grand Canyon; Venice; Istanbul; Tokyo; New York City; London; Paris; Rome; "
    "Jerusalem; Mumbai; Sydney; Rio de Janeiro; Cape Town; Moscow; Singapore; Hong Kong; the Mediterranean; "
    "the Great Wall of China; Niagara Falls; the Panama Canal; Siberia; the Alps; the Caribbean"
)
HISTORY = _list(
    "the French Revolution; the First World War; the Second World War; the fall of the Berlin Wall; the moon "
    "landing; the Industrial Revolution; the American Civil War; the fall of the Roman Empire; the Black "
    "Death; the Renaissance; the Cold War; the Great Depression; the invention of the printing press; the "
    "Russian Revolution; the civil rights movement; the discovery of penicillin; the building of the "
    "pyramids; the sinking of the Titanic; the Boston Tea Party; the partition of India; the Crusades; the "
    "Vietnam War; the Gold Rush; the Silk Road; the abolition of slavery; the invention of the telephone; "
    "women's suffrage; the Reformation; the age of exploration; the Cuban missile crisis; the space race; "
    "the founding of the United Nations; the Great Fire of London; the Spanish flu; the end of apartheid"
)
SCIENCE = _list(
    "photosynthesis; gravity; quantum entanglement; plate tectonics; natural selection; the greenhouse "
    "effect; DNA replication; nuclear fusion; the immune system; black holes; superconductors; osmosis; "
    "the periodic table; antibiotic resistance; the theory of relativity; the carbon cycle; chemical bonds; "
    "entropy; stem cells; the Doppler effect; mitosis; radioactivity; the nervous system; electromagnetic "
    "waves; enzymes; the big bang; acid rain; the food chain; momentum; vaccines; the water cycle; genes; "
    "semiconductors; ocean currents; the ozone layer; volcanoes; red blood cells; the scientific method; "
    "tides; lasers; hormones; fossils; comets; hurricanes; catalysts; friction; bacteria; viruses"
)
SOCIETY = _list(
    "democracy; inflation; supply and demand; human rights; capitalism; socialism; globalization; free "
    "speech; monetary policy; fiscal policy; the separation of powers; international trade; unemployment; "
    "urbanization; climate policy; public health; social media; the gig economy; universal basic income; "
    "immigration; freedom of the press; monopolies; minimum wages; taxes; the rule of law; nationalism; "
    "gender equality; privacy; consumer protection; public transport; ethics; utilitarianism; stoicism; "
    "existentialism; feminism; bureaucracy; propaganda; lobbying; microfinance; renewable energy; "
    "remote work; online education; artificial intelligence; self-driving cars; vegetarian diets; nuclear "
    "power; space travel; electric cars; fast fashion; tourism; plastic waste; working from home"
)
TECHNOLOGY = _list(
    "a computer network; blockchain; machine learning; cloud computing; an operating system; encryption; a "
    "database index; a search engine; a compiler; an API; version control; a firewall; GPS; Bluetooth; "
    "solar panels; a jet engine; 3D printing; a touch screen; Wi-Fi; a hard drive; a neural network; "
    "a web browser; virtual reality; a microwave oven; a refrigerator; a digital camera; an electric motor"
)
ANIMALS = _list(
    "elephants; penguins; honey bees; octopuses; wolves; blue whales; bats; kangaroos; cheetahs; owls; "
    "crocodiles; dolphins; hummingbirds; ants; giraffes; polar bears; sea turtles; spiders; horses; sharks; "
    "butterflies; cats; dogs; camels; frogs; eagles; pandas; snakes; chickens; squirrels; koalas; salmon"
)
FILMS = _list(
    "Star Wars; The Wizard of Oz; Titanic; Jurassic Park; The Lion King; The Godfather; Harry Potter; "
    "Home Alone; Back to the Future; The Lord of the Rings; Forrest Gump; Toy Story; Frozen; Jaws; Rocky; "
    "The Matrix; Casablanca; Gone with the Wind; Mary Poppins; Finding Nemo; Friends; Game of Thrones; "
    "The Office; Grease; King Kong; Pirates of the Caribbean; Beauty and the Beast; Psycho; Stranger Things"
)
BOOKS = _list(
    "Romeo and Juliet; Pride and Prejudice; Moby Dick; The Great Gatsby; To Kill a Mockingbird; Don Quixote; "
    "Frankenstein; Hamlet; War and Peace; Oliver Twist; The Odyssey; Animal Farm; Dracula; Jane Eyre; 1984; "
    "The Hobbit; Alice in Wonderland; Robinson Crusoe; Macbeth; Treasure Island; Little Women; Lord of the "
    "Flies; The Catcher in the Rye; Brave New World; Les Miserables; Crime and Punishment; Peter Pan"
)
THINGS = _list(
    "the heart; the liver; the human eye; gold; oxygen; salt; steel; coffee; chocolate; cheese; the piano; "
    "the guitar; football; basketball; chess; the Olympic Games; the World Cup; the Constitution; the "
    "Senate; the Supreme Court; the stock market; the dollar; Christmas; Ramadan; Thanksgiving; Easter; "
    "the moon; the sun; Mars; Jupiter; the Milky Way; pi; prime numbers; the alphabet; Latin; jazz; rice; "
    "bread; paper"
)
SPEAKERS = _list(
    "a pirate captain; a medieval knight; a famous detective; a strict teacher; a travel guide; a robot from "
    "the future; a tired chef; a film critic; a wise grandmother; a sports reporter; a space explorer; a "
    "shopkeeper; a doctor; a poet; a politician; a math teacher; a gardener; a fairy; a historian; a judge; "
    "Sherlock Holmes; Albert Einstein; William Shakespeare; Cleopatra; Leonardo da Vinci; Queen Victoria; an "
    "English translator; an interviewer; a machine learning engineer; a financial adviser"
)
MATTERS = _list(
    "the weather; your morning; love; the future of mankind; money; your greatest fear; a good breakfast; "
    "the sea; friendship; your job; why people travel; the best book ever written; getting old; music; war "
    "and peace; how to be happy; cats and dogs; the stars; hard work; your childhood; honesty; losing a "
    "game; learning a language; city life; winter"
)
PIECES = _list(
    "a blog post; a short speech; a product description; a cover letter; a poem; a review; a press release; "
    "the opening paragraph of a novel; a letter of complaint; a persuasive email; a diary entry; an "
    "advertisement; a news report; a dialogue between two friends; a limerick; a thank-you note; a "
    "motivational talk; a social media post; an outline for an article; an introduction for an essay"
)
OCCASIONS = _list(
    "a trip to the mountains; a new coffee machine; a lost dog; moving to another country; a local "
    "restaurant; a school play; the first snow; a broken laptop; a charity concert; a job as a data analyst; "
    "a new library; a delayed flight; a science fair; saving water; a marathon; a small bakery; a long-lost "
    "friend; a haunted house; a smart watch; recycling at work; a community garden; a graduation; a museum; "
    "a new manager; a football match; a birthday; a storm at sea; healthy food; a vegetable market"
)
